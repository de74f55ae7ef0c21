-- share: of the entries that a rank has just read, those go back to the stream that other ranks should have.
-- Blocked readers are served in the order in which they blocked, so one that is almost full may be before an empty one. Each
-- entry, and before them those that nobody has read, goes to the rank with the least in flight for its slots, this one if
-- several have; after `most` of its hops it stays. One for which a rank was chosen goes to that one, while it is there.
-- An entry that has gone back wakes whoever has waited longest.
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
-- ARG guesses list ms of each entry
-- ARG sessions list of each entry, "" for none
-- ARG chosen list the rank that was chosen for each entry, "" for none
-- INCLUDE clock loads
-- FLAGS allow-oom
-- RETURN {1 for an entry that has gone back, else 0 ...}
local own = {rank = rank, inflight = inflight, slots = slots}
local all, by_rank = {own}, {[rank] = own}
for _, each in ipairs(loads_of(now_ms())) do
  if each.rank ~= rank then all[#all + 1], by_rank[each.rank] = each, each end
end

local function rank_for(i, n)
  local best = by_rank[chosen[i]] or tonumber(hops[i]) >= most and own
  if not best then
    best = emptiest(all)
    n = n - 1
  end
  best.inflight = best.inflight + n
  return best
end

-- What is acknowledged is deleted, too.
for _, group in ipairs(redis.call('XINFO', 'GROUPS', queue)) do
  if group[2] == 'workers' then
    for _ = 1, math.min(redis.call('XLEN', queue) - group[6], 100) do emptiest(all) end
  end
end
local reply = {}
for i, job in ipairs(jobs) do
  reply[i] = 0
  local seen = redis.call('HMGET', job, 'state', 'entry', 'crashes', 'n')
  local is_own = seen[2] == entries[i] or seen[2] == '0-0' -- of one that never began the record knows no entry
  local is_fresh = seen[1] == 'queued' and is_own and tonumber(seen[3] or 0) == 0
  if is_fresh and rank_for(i, tonumber(seen[4] or 1)) ~= own then
    reply[i] = 1
    redis.call('XACK', queue, 'workers', entries[i])
    redis.call('XDEL', queue, entries[i])
    local more = sessions[i] ~= '' and {'session', sessions[i]} or {}
    local fresh = redis.call('XADD', queue, '*', 'job', tokens[i], 'guess', guesses[i], 'hops', hops[i] + 1, unpack(more))
    if seen[2] ~= '0-0' then redis.call('HSET', job, 'entry', fresh) end
  end
end
return reply
