-- reenqueue: give a job that has neither a lease nor a stream entry, and does not wait in its lane, its place back. Part of
-- a rebuild.
-- A lease that has run out counts too: ending leases is the sweep's, which gives such a job a new entry.
-- KEY job hash
-- KEY queue stream
-- KEY index zset
-- KEY leases zset
-- KEY timers zset
-- KEY tally list
-- ARG token str
-- INCLUDE clock lanes withdrawing entries charge requeue
-- FLAGS allow-oom
-- RETURN {"requeued"} | {"live"} | {"void"}
local state = redis.call('HGET', job, 'state')
if state ~= 'queued' and state ~= 'running' then
  if redis.call('ZREM', index, token) == 1 then redis.call('RPUSH', tally, 'vanished 1') end
  for choice = 1, 15 do redis.call('ZREM', index, token .. '#' .. choice) end
  return {'void'}
end
if redis.call('ZSCORE', leases, token) then return {'live'} end
local entry, turn = unpack(redis.call('HMGET', job, 'entry', 'turn'))
if entry == '0-0' and turn then
  -- No rank has begun it: it waits, or was moved into the stream, or has its turn again.
  if redis.call('ZSCORE', lanes.backlog, turn) or moved_entry(queue, token) then return {'live'} end
  redis.call('RPUSH', tally, 'requeued:rebuilt 1')
  -- It is in flight no longer. Had its lane been lost instead, its key seems for a while to have less than it has.
  charge(turn, 0, 0, true)
  join(turn)
  return {'requeued'}
end
local there = redis.call('XRANGE', queue, entry, entry)[1]
if there and there[2][2] == token then return {'live'} end
-- A new stream may have given its entry's id to another job.
if there then redis.call('HSET', job, 'entry', '0-0') end
requeue(job, queue, leases, timers, tally, token, 'rebuilt', now_ms())
return {'requeued'}
