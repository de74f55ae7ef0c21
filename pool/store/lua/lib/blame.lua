-- Counts the loss of an attempt, `seen` as in lib/finish.lua. Only one that logged no token is held against the job; before
-- its last try it becomes suspect, to run alone. Returns what the job fails with when it is not tried again, else nil.
local function blame(job, seen, cap, dead, keep, token)
  local before = redis.call('HMGET', job, 'begun_tokens', 'crashes', 'blamed', 'suspect')
  local losses = redis.call('HINCRBY', job, 'losses', 1)
  local crashes, blamed = 0, ''
  if tonumber(seen[8] or 0) == tonumber(before[1] or 0) then
    crashes, blamed = tonumber(before[2] or 0) + 1, (before[3] or '') .. seen[10] .. ' '
  end
  local suspect = crashes > 0 and crashes >= cap - 1 and 1 or 0
  redis.call('HSET', job, 'crashes', crashes, 'blamed', blamed, 'suspect', suspect)
  if not (crashes >= cap and (before[4] == '1' or cap == 1) or losses >= 10 * cap) then return nil end
  redis.call('XADD', dead, 'MAXLEN', '~', keep, '*', 'job', token, 'code', 'poison', 'losses', losses, 'rank', seen[5])
  local reason = 'It lost its worker ' .. losses .. ' times; it was not tried again.'
  return {'error_code', 'poison', 'error_message', reason}
end
