-- What the end of a job means to its lane, over what lib/lanes.lua declares.

-- Its key is charged with the slot time that its attempts took, instead of what they were taken to need; one that never began
-- costs nothing. `used_ms`: of each choice. A Program's job has not been moved by a feed: nothing was guessed of it.
local function charge(turn, used_ms, guess_ms, was_moved)
  local n, weight, cap = terms_of(turn)
  if was_moved and cap > 0 and redis.call('HINCRBY', lanes.fairness, 'busy:' .. key_of(turn), -n) <= 0 then
    redis.call('HDEL', lanes.fairness, 'busy:' .. key_of(turn))
  end
  if used_ms == guess_ms then return end
  local flow, change = flow_of(turn), weighed(used_ms, n, weight) - weighed(guess_ms, n, weight)
  local score = tonumber(redis.call('ZADD', lanes.flows, 'XX', 'INCR', change, flow) or nil)
  if not score and change > 0 then
    redis.call('ZADD', lanes.flows, band_of(lane_of(turn), true) + floor_of(lane_of(turn)) + change, flow)
  end
  -- A flow that was forgotten since, and has come back, never had this charge: it keeps to its band.
  local band = score and band_of(lane_of(turn), score - change >= band_of(0, true))
  if band and score < band then redis.call('ZADD', lanes.flows, band, flow) end
  -- One in four tells enough, unless it took far more or less than that.
  local is_told = used_ms > 2 * guess_ms or 2 * used_ms < guess_ms or string.find(turn, '^[048c]', 69)
  if was_moved and used_ms > 0 and is_told then
    redis.call('HSET', lanes.fairness, 'guess:' .. flow, math.floor((3 * guess_ms + used_ms) / 4 + 0.5))
  end
end

-- An ended job leaves the lanes; `seen` as in lib/finish.lua. Returns its entry in the stream.
local function leave_lanes(queue, token, seen, at_ms)
  local entry, turn, guess_ms = seen[2], seen[19], tonumber(seen[20] or 0)
  if not turn then return entry end
  local was_moved = not seen[18]
  if was_moved and entry == '0-0' then
    if withdraw_turn(turn) then
      was_moved = false
    else
      entry, guess_ms = moved_entry(queue, token)
      if not entry then return '0-0' end
    end
  end
  local used_ms = tonumber(seen[22] or 0) + (seen[1] == 'running' and seen[21] and math.max(at_ms - seen[21], 0) or 0)
  -- Even the shortest counts, or those of one key could go before all others for ever.
  if seen[14] then used_ms = math.max(used_ms, 1) end
  charge(turn, used_ms, guess_ms, was_moved)
  return entry
end
