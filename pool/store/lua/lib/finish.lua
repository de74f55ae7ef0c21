-- The one place where a job becomes terminal: state, ack, delete, lanes, indexes, timers, TTL, tombstone and outbox together.
-- `seen` holds the record's fields of ENDING, `values` the terminal ones to write, name by name.
-- Returns the nodes to wake, and the rank that may still be working on it.
local ENDING = {'state', 'entry', 'celery', 'watch', 'rank', 'tombstone_ms', 'n', 'tokens', 'attempt', 'nonce',
  'blocks', 'store', 'created_ms', 'started_ms', 'prompt_tokens', 'tenant', 'counted', 'program',
  'turn', 'guess_ms', 'begun_ms', 'used_ms'}
-- How much longer than the record its log and its input stay: whoever has read the record reads them whole.
local LINGER_MS = 60000
-- Upper bounds of histograms; pool/store/totals.py knows them too.
local BOUNDS_MS = {10, 50, 100, 500, 1000, 5000, 10000, 60000, 300000, 600000, 3600000}

local function within(ms)
  for _, bound_ms in ipairs(BOUNDS_MS) do
    if ms <= bound_ms then return bound_ms end
  end
  return 'inf'
end

-- What this end adds to the model's totals, as `name value ...`; one line costs a job less than several counters.
local function line_of(seen, state, at_ms, values)
  local line, prompt_tokens = 'ended:' .. state .. ' 1', tonumber(seen[15] or 0)
  for i = 1, #values, 2 do
    if values[i] == 'error_code' then line = line .. ' failed:' .. values[i + 1] .. ' 1' end
    if values[i] == 'prompt_tokens' then prompt_tokens = values[i + 1] end
  end
  -- One that never began has cost nothing, and its wait has no end.
  if not seen[14] then return line end
  local wait_ms = math.max(seen[14] - seen[13], 0)
  local run_ms = math.max(at_ms - seen[14], 0)
  return line .. ' prompt_tokens ' .. prompt_tokens .. ' output_tokens ' .. tonumber(seen[8] or 0)
    .. ' wait:' .. within(wait_ms) .. ' 1 wait_ms ' .. wait_ms .. ' run:' .. within(run_ms) .. ' 1 run_ms ' .. run_ms
end

local function finish(keys, token, seen, state, ttl_ms, at_ms, values)
  local _, _, celery, watch, rank, tombstone_ms, n = unpack(seen)
  local tenant, counted = seen[16] or '', seen[17]
  redis.call('HSET', keys.job, 'state', state, 'finished_ms', at_ms, unpack(values))
  local entry = leave_lanes(keys.queue, token, seen, at_ms)
  redis.call('XACK', keys.queue, 'workers', entry)
  redis.call('XDEL', keys.queue, entry)
  redis.call('RPUSH', keys.tally, line_of(seen, state, at_ms, values))
  redis.call('ZREM', keys.index, token)
  if counted then redis.call('ZREM', keys.tenants, tenant .. ':' .. token) end
  for choice = 1, tonumber(n) - 1 do
    redis.call('ZREM', keys.index, token .. '#' .. choice)
    if counted then redis.call('ZREM', keys.tenants, tenant .. ':' .. token .. '#' .. choice) end
  end
  redis.call('ZREM', keys.leases, token)
  redis.call('ZREM', keys.timers, 'queue:' .. token, 'run:' .. token, 'deadline:' .. token, 'reader:' .. token)
  local stored = seen[12] == '1'
  if seen[11] then release(keys.job, token, seen[11], keys.blocks, stored and at_ms + ttl_ms + LINGER_MS or 0) end
  if not stored then redis.call('HDEL', keys.job, 'input', 'prompt', 'blocks', 'prompt_blocks') end
  -- Instants, not times from now: on Redis 7.0 time goes on within a script.
  redis.call('PEXPIREAT', keys.job, at_ms + ttl_ms)
  redis.call('PEXPIREAT', keys.log, at_ms + ttl_ms + LINGER_MS)
  redis.call('SET', keys.tombstone, 'of:' .. tenant, 'PX', ttl_ms + tonumber(tombstone_ms))
  if celery == '1' then redis.call('ZADD', keys.outbox, at_ms, token) end
  return watch or '', rank or ''
end
