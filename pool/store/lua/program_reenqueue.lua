-- program_reenqueue: give a Program's job that was sent to a rank its entry in the rank's stream back, unless it has one, or
-- a lease: as reenqueue does for the model's stream.
-- KEY job hash
-- KEY queue stream of the rank
-- KEY leases zset
-- KEY timers zset
-- KEY tally list
-- KEY program hash
-- ARG token str
-- ARG id str of the Program
-- ARG rank str
-- INCLUDE clock requeue
-- FLAGS allow-oom
-- RETURN {"requeued"} | {"live"} | {"void"}: it waits in its pool, has ended, or was sent elsewhere
local seen = redis.call('HMGET', job, 'state', 'entry', 'generation')
local place = redis.call('HMGET', program, 'rank', 'gen')
if (seen[1] ~= 'queued' and seen[1] ~= 'running') or seen[2] == '0-0' then return {'void'} end
if place[1] ~= rank or place[2] ~= seen[3] then return {'void'} end
if redis.call('ZSCORE', leases, token) then return {'live'} end
local there = redis.call('XRANGE', queue, seen[2], seen[2])[1]
if there and there[2][2] == token then return {'live'} end
-- A new stream may have given its entry's id to another job.
if there then redis.call('HSET', job, 'entry', '0-0') end
local entry = redis.call('XADD', queue, '*', 'job', token, 'program', id)
requeue(job, queue, leases, timers, tally, token, 'rebuilt', now_ms(), entry)
return {'requeued'}
