-- reenqueue: give a job that has neither a lease nor a stream entry its entry back. Part of a rebuild.
-- A lease that has run out counts too: ending leases is the sweep's, which gives such a job a new entry.
-- KEY job hash
-- KEY queue stream
-- KEY index zset
-- KEY leases zset
-- KEY timers zset
-- KEY tally list
-- ARG token str
-- INCLUDE clock requeue
-- FLAGS allow-oom
-- RETURN {"requeued"} | {"live"} | {"void"}
local seen = redis.call('HMGET', job, 'state', 'entry')
if seen[1] ~= 'queued' and seen[1] ~= 'running' then
  if redis.call('ZREM', index, token) == 1 then redis.call('RPUSH', tally, 'vanished 1') end
  for choice = 1, 15 do redis.call('ZREM', index, token .. '#' .. choice) end
  return {'void'}
end
if redis.call('ZSCORE', leases, token) then return {'live'} end
local there = redis.call('XRANGE', queue, seen[2], seen[2])[1]
if there and there[2][2] == token then return {'live'} end
-- A new stream may have given its entry's id to another job.
if there then redis.call('HSET', job, 'entry', '0-0') end
requeue(job, queue, leases, timers, tally, token, 'rebuilt', now_ms())
return {'requeued'}
