-- begin: start a new attempt. Only the pending-list owner of the job's own entry begins, and never under a live lease.
-- A job whose last worker died with it begins only where nothing else runs, so that its mates are not blamed for it.
-- KEY job hash
-- KEY queue stream
-- KEY leases zset
-- KEY timers zset
-- ARG token str
-- ARG entry str stream entry that was read
-- ARG rank str consumer that read it
-- ARG nonce str random fence of the new attempt
-- ARG lease ms
-- ARG alone flag 1: nothing else runs at this rank
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok", attempt, alone, options, prompt, input, n, seed, tokens, watch, task_id, created_ms, celery}
--   | {"alone"} | {"dropped"} | {"not-owner"} | {"leased"}; input only where the prompt is not tokenized yet
local seen = redis.call('HMGET', job, 'state', 'entry', 'suspect', 'attempt', 'started_ms', 'run_timeout_ms',
  'options', 'prompt', 'n', 'seed', 'tokens', 'watch', 'task_id', 'created_ms', 'celery')
if seen[2] ~= entry or (seen[1] ~= 'queued' and seen[1] ~= 'running') then
  redis.call('XACK', queue, 'workers', entry)
  redis.call('XDEL', queue, entry)
  return {'dropped'}
end
if #redis.call('XPENDING', queue, 'workers', entry, entry, 1, rank) == 0 then return {'not-owner'} end
local at_ms = now_ms()
local leased_until = redis.call('ZSCORE', leases, token)
if leased_until and tonumber(leased_until) > at_ms then return {'leased'} end
local suspect = seen[3] == '1'
if suspect and alone == 0 then return {'alone'} end
local attempt = tonumber(seen[4] or 0) + 1
redis.call('HSET', job, 'state', 'running', 'attempt', attempt, 'nonce', nonce, 'rank', rank,
  'started_ms', seen[5] or at_ms)
if not seen[5] then
  redis.call('ZREM', timers, 'queue:' .. token)
  redis.call('ZADD', timers, at_ms + tonumber(seen[6]), 'run:' .. token)
end
redis.call('ZADD', leases, at_ms + lease, token)
local input = seen[8] == '' and redis.call('HGET', job, 'input') or ''
return {'ok', attempt, suspect and 1 or 0, seen[7], seen[8], input, unpack(seen, 9)}
