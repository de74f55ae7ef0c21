-- requeue_unbegun: give back an entry that a rank read but never began. Costs the job nothing.
-- A rank gives back its own, with their nonces: one that it began without ever getting the reply counts as unbegun.
-- KEY job hash
-- KEY queue stream
-- KEY leases zset
-- KEY timers zset
-- KEY tally list
-- ARG token str
-- ARG entry str
-- ARG idle ms the entry must have been pending untouched
-- ARG nonce str with which its rank tried to begin it, "" when another one asks
-- INCLUDE clock requeue
-- FLAGS allow-oom
-- RETURN {"requeued"} | {"live"} | {"dropped"}
if #redis.call('XPENDING', queue, 'workers', 'IDLE', idle, entry, entry, 1) == 0 then return {'live'} end
local seen = redis.call('HMGET', job, 'state', 'entry')
local there = redis.call('XRANGE', queue, entry, entry)[1]
-- One that no rank has begun since it was moved there is not in the record yet.
if seen[2] == '0-0' and there and there[2][2] == token and there[2][4] then
  redis.call('HSET', job, 'entry', entry, 'guess_ms', there[2][4])
  seen[2] = entry
end
if seen[2] ~= entry or (seen[1] ~= 'queued' and seen[1] ~= 'running') then
  redis.call('XACK', queue, 'workers', entry)
  redis.call('XDEL', queue, entry)
  return {'dropped'}
end
if redis.call('ZSCORE', leases, token) and (nonce == '' or redis.call('HGET', job, 'nonce') ~= nonce) then
  return {'live'}
end
requeue(job, queue, leases, timers, tally, token, 'unbegun', now_ms())
return {'requeued'}
