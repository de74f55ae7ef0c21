-- reenqueue: give a job that has neither a live lease nor a stream entry its entry back. Part of a rebuild.
-- KEY job hash
-- KEY queue stream
-- KEY index zset
-- KEY leases zset
-- ARG token str
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"requeued"} | {"live"} | {"void"}
local seen = redis.call('HMGET', job, 'state', 'entry')
if seen[1] ~= 'queued' and seen[1] ~= 'running' then
  redis.call('ZREM', index, token)
  for choice = 1, 15 do redis.call('ZREM', index, token .. '#' .. choice) end
  return {'void'}
end
local until_ms = redis.call('ZSCORE', leases, token)
if until_ms and tonumber(until_ms) > now_ms() then return {'live'} end
if #redis.call('XRANGE', queue, seen[2], seen[2]) > 0 then return {'live'} end
local fresh = redis.call('XADD', queue, '*', 'job', token)
redis.call('HSET', job, 'state', 'queued', 'entry', fresh)
redis.call('ZREM', leases, token)
return {'requeued'}
