-- begin: start a new attempt. Only the pending-list owner of the job's own entry begins, and never under another's lease,
-- run out or not: ending leases is the sweep's. Repeating it with its nonce, when its reply got lost, gives the same reply.
-- A job that was lost before it logged a token begins by itself, beside jobs that have shown tokens since; before its
-- last try, where nothing else runs. So whoever is lost with it is not blamed for it.
-- KEY job hash
-- KEY queue stream
-- KEY leases zset
-- KEY timers zset
-- ARG token str
-- ARG entry str stream entry that was read
-- ARG rank str consumer that read it
-- ARG nonce str random fence of the new attempt
-- ARG lease ms
-- ARG alone how far: 0 others begin beside it, 1 only jobs that have shown tokens run there, 2 nothing else runs there,
--   or it has waited for that long enough
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok", attempt, alone, options, prompt, input, n, seed, tokens, watch, task_id, created_ms, celery,
--   tenant} | {"alone"} | {"dropped"} | {"not-owner"} | {"leased"}; input only where the prompt is not tokenized yet; where
--   both lie in blocks, these follow: blocks, prompt_blocks
local seen = redis.call('HMGET', job, 'state', 'entry', 'crashes', 'attempt', 'nonce', 'started_ms', 'run_timeout_ms',
  'options', 'prompt', 'n', 'seed', 'tokens', 'watch', 'task_id', 'created_ms', 'celery', 'blocks', 'suspect', 'begun_tokens',
  'run_left_ms', 'tenant')
if seen[2] ~= entry or (seen[1] ~= 'queued' and seen[1] ~= 'running') then
  redis.call('XACK', queue, 'workers', entry)
  redis.call('XDEL', queue, entry)
  return {'dropped'}
end
local owned = redis.pcall('XPENDING', queue, 'workers', entry, entry, 1, rank)
if owned.err or #owned == 0 then return {'not-owner'} end
local at_ms = now_ms()
local begun = redis.call('ZSCORE', leases, token)
if begun and seen[5] ~= nonce then return {'leased'} end
local logged = tonumber(seen[12] or 0)
local needed = 0
if tonumber(seen[3] or 0) > 0 and logged == tonumber(seen[19] or 0) then needed = seen[18] == '1' and 2 or 1 end
if alone < needed and not begun then return {'alone'} end
local attempt = tonumber(seen[4] or 0) + (begun and 0 or 1)
redis.call('HSET', job, 'state', 'running', 'attempt', attempt, 'nonce', nonce, 'rank', rank,
  'started_ms', seen[6] or at_ms, 'begun_tokens', logged)
if needed == 0 and seen[3] then redis.call('HDEL', job, 'crashes', 'suspect', 'blamed') end
-- The run timer begins, or goes on where a requeue has paused it; a repeated begin finds neither.
local run_ms = seen[20] or not seen[6] and seen[7]
if run_ms then
  redis.call('HDEL', job, 'run_left_ms')
  redis.call('ZREM', timers, 'queue:' .. token)
  redis.call('ZADD', timers, at_ms + tonumber(run_ms), 'run:' .. token)
end
redis.call('ZADD', leases, at_ms + lease, token)
local input = seen[9] == '' and redis.call('HGET', job, 'input') or ''
local reply = {'ok', attempt, needed > 0 and 1 or 0, seen[8], seen[9], input, unpack(seen, 10, 16)}
reply[14] = seen[21]
if seen[17] then reply[15], reply[16] = seen[17], redis.call('HGET', job, 'prompt_blocks') end
return reply
