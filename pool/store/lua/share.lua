-- share: of the entries that a rank has just read, those go back to the stream that emptier ranks should have.
-- Blocked readers are served in the order in which they blocked, so one that is almost full may be before an empty one. Each
-- entry, and before them those that nobody has read, goes to the rank with the least in flight for its slots, this one if
-- several have. An entry that has gone back wakes whoever has waited longest; after `most` of its hops it stays.
-- KEY queue stream
-- KEY ranks zset
-- KEY load hash rank -> `IN_FLIGHT SLOTS`
-- KEYS jobs hash one an entry
-- ARG rank str
-- ARG inflight num generations it has
-- ARG slots num that it may have
-- ARG most num
-- ARG tokens list
-- ARG entries list
-- ARG hops list of each entry
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {1 for an entry that has gone back, else 0 ...}
local at_ms = now_ms()
local own = {inflight = inflight, slots = slots}
local all = {own}
local told = redis.call('HGETALL', load)
for i = 1, #told, 2 do
  local ends_ms = told[i] ~= rank and redis.call('ZSCORE', ranks, told[i])
  local busy, room = string.match(told[i + 1], '^(%d+) (%d+)$')
  if ends_ms and tonumber(ends_ms) > at_ms then all[#all + 1] = {inflight = tonumber(busy), slots = tonumber(room)} end
end

local function emptiest()
  local best = own
  for _, each in ipairs(all) do
    local is_free = each.inflight < each.slots
    if is_free and each.inflight * best.slots < best.inflight * each.slots then best = each end
  end
  best.inflight = best.inflight + 1
  return best
end

-- What is acknowledged is deleted, too.
for _, group in ipairs(redis.call('XINFO', 'GROUPS', queue)) do
  if group[2] == 'workers' then
    for _ = 1, math.min(redis.call('XLEN', queue) - group[6], 100) do emptiest() end
  end
end
local reply = {}
for i, job in ipairs(jobs) do
  reply[i] = 0
  local seen = redis.call('HMGET', job, 'state', 'entry', 'crashes')
  local is_fresh = seen[1] == 'queued' and seen[2] == entries[i] and tonumber(seen[3] or 0) == 0
  if is_fresh and tonumber(hops[i]) < most and emptiest() ~= own then
    reply[i] = 1
    redis.call('XACK', queue, 'workers', entries[i])
    redis.call('XDEL', queue, entries[i])
    redis.call('HSET', job, 'entry', redis.call('XADD', queue, '*', 'job', tokens[i], 'hops', hops[i] + 1))
  end
end
return reply
