-- The one place where a job becomes terminal: state, ack, delete, indexes, TTL and outbox change together.
-- Returns the nodes to wake, and the rank that may still be working on it.
local function finish(keys, token, state, ttl_ms, at_ms)
  local seen = redis.call('HMGET', keys.job, 'entry', 'celery', 'watch', 'rank')
  redis.call('HSET', keys.job, 'state', state, 'finished_ms', at_ms)
  redis.call('XACK', keys.queue, 'workers', seen[1])
  redis.call('XDEL', keys.queue, seen[1])
  redis.call('ZREM', keys.index, token)
  redis.call('ZREM', keys.leases, token)
  redis.call('PEXPIRE', keys.job, ttl_ms)
  redis.call('PEXPIRE', keys.log, ttl_ms)
  if seen[2] == '1' then redis.call('ZADD', keys.outbox, at_ms, token) end
  return seen[3] or '', seen[4] or ''
end
