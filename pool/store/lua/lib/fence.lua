-- The fence of plain work: nil while (attempt, nonce) is the job's running attempt, else the reply to give.
-- Second, the fields that were read: state, attempt, nonce, tokens, watch.
-- attempt and nonce are compared as strings: a Lua number never equals a stored value.
local function refused(job, attempt, nonce)
  local seen = redis.call('HMGET', job, 'state', 'attempt', 'nonce', 'tokens', 'watch')
  if not seen[1] then return {'gone'} end
  if seen[1] ~= 'running' then return {'stale', seen[1]} end
  if seen[2] ~= attempt or seen[3] ~= nonce then return {'stale', seen[1]} end
  return nil, seen
end
