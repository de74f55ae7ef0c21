-- How full the replicas are whose lease holds, as each has told last, over the keys `ranks` and `load`: a list of
-- {rank, inflight, slots}.
local function loads_of(at_ms)
  local found, told = {}, redis.call('HGETALL', load)
  for i = 1, #told, 2 do
    local ends_ms = redis.call('ZSCORE', ranks, told[i])
    local busy, room = string.match(told[i + 1], '^(%d+) (%d+)$')
    if ends_ms and tonumber(ends_ms) > at_ms then
      found[#found + 1] = {rank = told[i], inflight = tonumber(busy), slots = tonumber(room)}
    end
  end
  return found
end

-- The emptiest for its slots that has a free one, the first of `all` if several are; it has one more from then on.
local function emptiest(all)
  local best = all[1]
  for _, each in ipairs(all) do
    local is_free = each.inflight < each.slots
    if is_free and each.inflight * best.slots < best.inflight * each.slots then best = each end
  end
  best.inflight = best.inflight + 1
  return best
end
