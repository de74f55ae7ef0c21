-- Moves jobs from their flows into the model's stream `queue`, as pool/rules/fairness.py has it, over what lib/lanes.lua declares.

-- Of the slot time that higher lanes are given while a lower one waits, this part is owed to it, up to what its next job needs.
local SHARE = 0.1

-- Charges a flow with what its first job is taken to need, until its end tells.
local function serve(f, flow, is_owed)
  local lane, cost = flow.lane, flow.cost
  if flow.vt > f.clock[lane] then f.clock[lane], f.ticked[lane] = flow.vt, true end
  for lower = lane + 1, LANES - 1 do
    local first = f.list[lower][1] and next_of(f, lower, true)
    if first and f.owed[lower] < first.cost then f.owed[lower] = f.owed[lower] + SHARE * cost end
  end
  if is_owed then f.owed[lane] = f.owed[lane] - cost end
  flow.vt = flow.vt + weighed(cost, 1, flow.weight)
  if flow.cap > 0 then
    f.busy[flow.key] = f.busy[flow.key] + flow.n
    f.capped[flow.key] = true
  end
  step_on(f, flow)
end

-- Writes what a feed has changed.
local function note(f, turns)
  local scores, facts = {}, {}
  for _, flow in ipairs(f.looked) do
    scores[#scores + 1], scores[#scores + 2] = band_of(flow.lane, not flow.front) + flow.vt, flow.name
  end
  for key in pairs(f.capped) do facts[#facts + 1], facts[#facts + 2] = 'busy:' .. key, f.busy[key] end
  for lane = 0, LANES - 1 do
    if f.ticked[lane] then facts[#facts + 1], facts[#facts + 2] = 'clock:' .. lane, f.clock[lane] end
    local owed = f.list[lane][1] and f.owed[lane] or 0
    if owed ~= f.owing[lane] then facts[#facts + 1], facts[#facts + 2] = 'owed:' .. lane, owed end
  end
  if scores[1] then redis.call('ZADD', lanes.flows, unpack(scores)) end
  if facts[1] then redis.call('HSET', lanes.fairness, unpack(facts)) end
  if turns[1] then redis.call('ZREM', lanes.backlog, unpack(turns)) end
end

-- Serves flows until the choices that were moved fill `room`.
local function feed(room)
  if room <= 0 then return end
  local f = {room = room, list = {}, clock = {}, owed = {}, busy = {}, looked = {}, owing = {}, capped = {}, ticked = {}}
  local seen = redis.call('HMGET', lanes.fairness, 'clock:0', 'clock:1', 'clock:2', 'owed:0', 'owed:1', 'owed:2')
  for lane = 0, LANES - 1 do
    f.list[lane], f.clock[lane], f.owed[lane] = flows_of(lane, room), tonumber(seen[lane + 1] or 0), tonumber(seen[lane + 4] or 0)
    f.owing[lane] = f.owed[lane]
  end
  local turns, left = {}, room
  while left > 0 do
    local flow, is_owed = next_flow(f, false)
    if not flow then flow = next_flow(f, true) end
    if not flow then break end
    redis.call('XADD', queue, '*', 'job', flow.token, 'guess', flow.guess, unpack(flow.session))
    turns[#turns + 1] = flow.front
    left = left - flow.n
    serve(f, flow, is_owed)
  end
  note(f, turns)
end
