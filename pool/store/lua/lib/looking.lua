-- What a feed reads of flows, over what lib/lanes.lua declares. It, `f`, has by lane `list`, the flows that wait, `clock` and
-- `owed`, by key `busy`, choices in flight of those that have a cap; `looked`, the flows that it has read, and `room`.

-- The flows of a lane that wait, the least virtual time first: those that a feed of `room` may come to look at.
local function flows_of(lane, room)
  local band, list = band_of(lane), {}
  local found = redis.call('ZRANGEBYSCORE', lanes.flows, band, below(band + BAND), 'WITHSCORES', 'LIMIT', 0, room + 20)
  for i = 1, #found, 2 do list[#list + 1] = {name = found[i], lane = lane, vt = found[i + 1] - band} end
  return list
end

-- Reads a flow, once.
local function look_at(f, flow)
  local name, key = flow.name, string.sub(flow.name, 3)
  local seen = redis.call('HMGET', lanes.fairness, 'guess:' .. name, 'busy:' .. key)
  flow.turns = redis.call('ZRANGEBYLEX', lanes.backlog, '[' .. name .. ':', '(' .. name .. ';', 'LIMIT', 0, f.room + 1)
  flow.at, flow.key, flow.guess = 0, key, tonumber(seen[1] or FIRST_GUESS_MS)
  f.busy[key] = f.busy[key] or tonumber(seen[2] or 0)
  f.looked[#f.looked + 1] = flow
end

-- Goes on to the next job of a flow; without one it leaves its list.
local function step_on(f, flow)
  if not flow.turns then look_at(f, flow) end
  flow.at = flow.at + 1
  flow.front = flow.turns[flow.at]
  if flow.front then
    flow.token, flow.n, flow.weight, flow.cap, flow.session = token_of(flow.front), terms_of(flow.front)
    flow.cost = flow.guess * flow.n
    return
  end
  for i, other in ipairs(f.list[flow.lane]) do
    if other == flow then return table.remove(f.list[flow.lane], i) end
  end
end
