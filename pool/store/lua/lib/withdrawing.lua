-- A job that waits leaves without its turn; whether it did wait. Once nothing else of its flow waits, that rests.
local function withdraw_turn(turn)
  if redis.call('ZREM', lanes.backlog, turn) == 0 then return false end
  local lane, flow = lane_of(turn), flow_of(turn)
  if redis.call('ZLEXCOUNT', lanes.backlog, '[' .. flow .. ':', '(' .. flow .. ';') > 0 then return true end
  redis.call('ZADD', lanes.flows, 'XX', 'INCR', LANES * BAND, flow)
  local band = band_of(lane)
  if redis.call('ZCOUNT', lanes.flows, band, below(band + BAND)) == 0 then
    redis.call('HDEL', lanes.fairness, 'owed:' .. lane)
  end
  return true
end
