-- The one place where a job becomes terminal: state, ack, delete, indexes, timers, TTL, tombstone and outbox together.
-- `seen` holds the record's fields of ENDING, `values` the terminal ones to write, name by name.
-- Returns the nodes to wake, and the rank that may still be working on it.
local ENDING = {'state', 'entry', 'celery', 'watch', 'rank', 'tombstone_ms', 'n', 'tokens', 'attempt', 'nonce',
  'blocks', 'store', 'tenant'}
-- How much longer than the record its log and its input stay: whoever has read the record reads them whole.
local LINGER_MS = 60000

local function finish(keys, token, seen, state, ttl_ms, at_ms, values)
  local _, entry, celery, watch, rank, tombstone_ms, n = unpack(seen)
  local tenant = seen[13] or ''
  redis.call('HSET', keys.job, 'state', state, 'finished_ms', at_ms, unpack(values))
  redis.call('XACK', keys.queue, 'workers', entry)
  redis.call('XDEL', keys.queue, entry)
  redis.call('ZREM', keys.index, token)
  redis.call('ZREM', keys.tenants, tenant .. ':' .. token)
  for choice = 1, tonumber(n) - 1 do
    redis.call('ZREM', keys.index, token .. '#' .. choice)
    redis.call('ZREM', keys.tenants, tenant .. ':' .. token .. '#' .. choice)
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
