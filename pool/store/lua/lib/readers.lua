-- Ranks that wait for work: `hungry` (zset) has each that blocks on the stream, by when it will have looked again. Jobs are
-- moved into the stream `queue` while more of them wait than it holds entries that nobody has read. A rank that has died
-- stays there for a moment: a job is then moved earlier than it need be.

-- Entries that nobody has read, as what is acknowledged is deleted, too; nil without a group.
local function unread()
  local length = redis.call('XLEN', queue)
  local found = redis.pcall('XINFO', 'GROUPS', queue)
  if found.err then return nil end
  for _, group in ipairs(found) do
    if group[2] == 'workers' then return length - group[6] end
  end
end

local function readers(at_ms)
  return redis.call('ZCOUNT', hungry, at_ms, '+inf')
end

-- Whether a rank waits for which no entry is there.
local function is_awaited(at_ms)
  local waiting = readers(at_ms)
  local left = waiting > 0 and unread()
  return left and waiting > left
end
