-- After a gap in the sweeps nobody may have been able to renew or to end anything.

-- Until when nothing may expire because of that, and the end of the last gap. A clock that went back is a gap, too.
local function gap_of(sweep, lease, at_ms)
  local swept = redis.call('HMGET', sweep, 'last_ms', 'hold_until_ms', 'back_ms')
  local gap_ms = at_ms - tonumber(swept[1] or 0)
  if gap_ms < 0 or gap_ms > lease / 2 then return at_ms + lease, at_ms end
  return tonumber(swept[2] or 0), tonumber(swept[3] or 0)
end
