-- Moves a job into the stream `queue` that comes while nothing waits: as a feed would, that had but this one to choose.
local function move_at_once(turn)
  local lane, flow, n, weight, cap, session = lane_of(turn), flow_of(turn), terms_of(turn)
  local rests = band_of(lane, true)
  local score = tonumber(redis.call('ZSCORE', lanes.flows, flow) or rests)
  local seen = redis.call('HMGET', lanes.fairness, 'guess:' .. flow, 'clock:' .. lane)
  local guess, clock = tonumber(seen[1] or FIRST_GUESS_MS), tonumber(seen[2] or 0)
  local begins = math.max(score - rests, clock)
  redis.call('XADD', queue, '*', 'job', token_of(turn), 'guess', guess, unpack(session))
  redis.call('ZADD', lanes.flows, rests + begins + weighed(guess, n, weight), flow)
  if begins > clock then redis.call('HSET', lanes.fairness, 'clock:' .. lane, begins) end
  if cap > 0 then redis.call('HINCRBY', lanes.fairness, 'busy:' .. key_of(turn), n) end
end
