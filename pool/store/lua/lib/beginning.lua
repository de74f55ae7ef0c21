-- How an attempt begins, over what begin and program_begin declare by the same names. Returns the reply of begin. `guess`: what
-- the entry says that a choice was taken to need, nil for a Program's job. The first entry that begins is the job's own:
-- a job that was moved into the stream has no other.
local function beginning(guess)
  local seen = redis.call('HMGET', job, 'state', 'entry', 'crashes', 'attempt', 'nonce', 'started_ms', 'run_timeout_ms',
    'options', 'prompt', 'n', 'seed', 'tokens', 'watch', 'task_id', 'created_ms', 'celery', 'blocks', 'suspect', 'begun_tokens',
    'run_left_ms', 'tenant', 'guess_ms')
  local is_first = guess and seen[2] == '0-0'
  if not is_first and seen[2] ~= entry or (seen[1] ~= 'queued' and seen[1] ~= 'running') then
    redis.call('XACK', queue, 'workers', entry)
    redis.call('XDEL', queue, entry)
    return {'dropped'}
  end
  -- Whoever unloads the model ends it.
  if redis.call('HGET', model, 'wanted') == 'unloaded' then return {'unloading'} end
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
    'started_ms', seen[6] or at_ms, 'begun_tokens', logged, 'begun_ms', at_ms, 'entry', entry,
    'guess_ms', is_first and guess or seen[22] or 0)
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
end
