-- take_back: take a job from a rank whose lease ran out: back to the queue, or failed as poison at the cap.
-- KEY job hash
-- KEY log list
-- KEY queue stream
-- KEY index zset
-- KEY leases zset
-- KEY outbox zset
-- KEY sweep hash
-- ARG token str
-- ARG cap begun attempts that may be lost in a row
-- ARG ttl ms
-- INCLUDE clock requeue finish
-- FLAGS allow-oom
-- RETURN {"requeued", watch, rank} | {"poison", watch, rank} | {"live"} | {"ended"}
local at_ms = now_ms()
if tonumber(redis.call('HGET', sweep, 'hold_until_ms') or 0) > at_ms then return {'live'} end
local until_ms = redis.call('ZSCORE', leases, token)
if not until_ms or tonumber(until_ms) > at_ms then return {'live'} end
local seen = redis.call('HMGET', job, 'state', 'watch', 'rank')
if seen[1] ~= 'running' then
  redis.call('ZREM', leases, token)
  return {'ended'}
end
local crashes = redis.call('HINCRBY', job, 'crashes', 1)
if crashes < cap then
  requeue(job, queue, leases, token)
  return {'requeued', seen[2] or '', seen[3] or ''}
end
redis.call('HSET', job, 'error_code', 'poison', 'error_message',
  'Every one of ' .. crashes .. ' attempts lost its worker.')
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox}
return {'poison', finish(keys, token, 'failed', ttl, at_ms)}
