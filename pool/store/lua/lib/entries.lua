-- The entry of a job that was moved into the stream `queue` and that no rank has begun since: its record does not name it yet.

-- Its id, and what a choice of it was taken to need; nil without one. The stream is as short as what runs.
local function moved_entry(queue, token)
  local from = '-'
  while true do
    local page = redis.call('XRANGE', queue, from, '+', 'COUNT', 100)
    for _, item in ipairs(page) do
      if item[2][2] == token then return item[1], tonumber(item[2][4] or 0) end
    end
    if #page < 100 then return nil end
    from = '(' .. page[100][1]
  end
end
