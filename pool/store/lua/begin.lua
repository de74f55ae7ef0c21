-- begin: start a new attempt. Only the pending-list owner of the job's own entry begins, and never under a live lease.
-- KEY job hash
-- KEY queue stream
-- KEY leases zset
-- ARG token str
-- ARG entry str stream entry that was read
-- ARG rank str consumer that read it
-- ARG nonce str random fence of the new attempt
-- ARG lease ms
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok", attempt, request, prompt, n, seed, tokens, watch, task_id, created_ms} | {"dropped"} | {"not-owner"} | {"leased"}
local seen = redis.call('HMGET', job, 'state', 'entry')
if seen[2] ~= entry or (seen[1] ~= 'queued' and seen[1] ~= 'running') then
  redis.call('XACK', queue, 'workers', entry)
  redis.call('XDEL', queue, entry)
  return {'dropped'}
end
if #redis.call('XPENDING', queue, 'workers', entry, entry, 1, rank) == 0 then return {'not-owner'} end
local at_ms = now_ms()
local leased_until = redis.call('ZSCORE', leases, token)
if leased_until and tonumber(leased_until) > at_ms then return {'leased'} end
local attempt = redis.call('HINCRBY', job, 'attempt', 1)
redis.call('HSET', job, 'state', 'running', 'nonce', nonce, 'rank', rank)
redis.call('HSETNX', job, 'started_ms', at_ms)
redis.call('ZADD', leases, at_ms + lease, token)
local record = redis.call('HMGET', job, 'request', 'prompt', 'n', 'seed', 'tokens', 'watch', 'task_id', 'created_ms')
return {'ok', attempt, unpack(record)}
