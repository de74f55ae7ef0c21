-- forget: drop flows of which nothing waits, those with the least virtual time first, while there are more than are kept: a key
-- that had more than others does not come back as if it were new. What runs of one that is forgotten is charged all the same.
-- ARG most flows that are kept
-- INCLUDE lanes
-- FLAGS allow-oom
-- RETURN how many were dropped
local over, dropped = redis.call('ZCARD', lanes.flows) - most, 0
for lane = 0, LANES - 1 do
  local band = band_of(lane, true)
  local left = math.min(over - dropped, 100)
  local found = left > 0 and redis.call('ZRANGEBYSCORE', lanes.flows, band, below(band + BAND), 'LIMIT', 0, left) or {}
  for _, flow in ipairs(found) do
    redis.call('ZREM', lanes.flows, flow)
    redis.call('HDEL', lanes.fairness, 'guess:' .. flow)
  end
  dropped = dropped + #found
end
return dropped
