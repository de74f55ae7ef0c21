-- take_back: take a job from a rank whose lease ran out: back to the queue, or failed as poison at the cap.
-- Before its last try it becomes suspect, to run alone: it is blamed only when it was alone, or lost far too often.
-- KEY job hash
-- KEY log list
-- KEY queue stream
-- KEY index zset
-- KEY leases zset
-- KEY outbox zset
-- KEY timers zset
-- KEY tombstone string
-- KEY sweep hash
-- KEY dead stream
-- ARG token str
-- ARG cap begun attempts that may be lost in a row
-- ARG ttl ms
-- ARG keep dead letters kept
-- INCLUDE clock requeue finish
-- FLAGS allow-oom
-- RETURN {"requeued", watch, rank} | {"poison", watch, rank} | {"live"} | {"ended"}
local at_ms = now_ms()
if tonumber(redis.call('HGET', sweep, 'hold_until_ms') or 0) > at_ms then return {'live'} end
local until_ms = redis.call('ZSCORE', leases, token)
if not until_ms or tonumber(until_ms) > at_ms then return {'live'} end
local seen = redis.call('HMGET', job, unpack(ENDING))
if seen[1] ~= 'running' then
  redis.call('ZREM', leases, token)
  return {'ended'}
end
local crashes = redis.call('HINCRBY', job, 'crashes', 1)
local losses = redis.call('HINCRBY', job, 'losses', 1)
local alone = redis.call('HGET', job, 'suspect') == '1' or cap == 1
if not (crashes >= cap and alone or losses >= 10 * cap) then
  if crashes >= cap - 1 then redis.call('HSET', job, 'suspect', 1) end
  requeue(job, queue, leases, token)
  return {'requeued', seen[4] or '', seen[5] or ''}
end
redis.call('XADD', dead, 'MAXLEN', '~', keep, '*', 'job', token, 'code', 'poison', 'losses', losses, 'rank', seen[5])
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox,
  timers = timers, tombstone = tombstone}
local reason = 'It lost its worker ' .. losses .. ' times; it was not tried again.'
local values = {'error_code', 'poison', 'error_message', reason}
return {'poison', finish(keys, token, seen, 'failed', ttl, at_ms, values)}
