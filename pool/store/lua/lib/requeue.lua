-- Puts a job back at the end of its stream under a new entry id: a new entry wakes a blocked reader, an entry left in a
-- pending list wakes nobody.
local function requeue(job, queue, leases, token)
  local entry = redis.call('HGET', job, 'entry')
  redis.call('XACK', queue, 'workers', entry)
  redis.call('XDEL', queue, entry)
  local fresh = redis.call('XADD', queue, '*', 'job', token)
  redis.call('HSET', job, 'state', 'queued', 'entry', fresh)
  redis.call('ZREM', leases, token)
end
