-- Puts a job back into its stream under a new entry id: a new entry wakes a blocked reader, an entry left in a pending list
-- wakes nobody. The stream is short and goes before all lanes: the job has had its turn.
-- Its run timer pauses while it waits its turn again: begin.lua sets what is left of it. Meanwhile it has its queue
-- timeout again, or the run time that was left if that is longer, so that it ends though nobody ever begins it.
-- `why` is counted: lost, handed_back, unbegun or rebuilt. `other`: what to note for an entry, where it goes elsewhere.
local function requeue(job, queue, leases, timers, tally, token, why, at_ms, other)
  redis.call('RPUSH', tally, 'requeued:' .. why .. ' 1')
  local seen = redis.call('HMGET', job, 'entry', 'queue_timeout_ms', 'state', 'begun_ms', 'used_ms', 'session')
  redis.call('XACK', queue, 'workers', seen[1])
  redis.call('XDEL', queue, seen[1])
  local more = seen[6] and {'guess', 0, 'session', seen[6]} or {}
  local fresh = other or redis.call('XADD', queue, '*', 'job', token, unpack(more))
  redis.call('HSET', job, 'state', 'queued', 'entry', fresh)
  if seen[3] == 'running' and seen[4] then
    redis.call('HSET', job, 'used_ms', (seen[5] or 0) + math.max(at_ms - seen[4], 0))
  end
  redis.call('ZREM', leases, token)
  local left_ms = tonumber(redis.call('ZSCORE', timers, 'run:' .. token) or 0) - at_ms
  -- One that is due is the sweep's to carry out.
  if left_ms <= 0 then return end
  redis.call('HSET', job, 'run_left_ms', left_ms)
  redis.call('ZREM', timers, 'run:' .. token)
  redis.call('ZADD', timers, at_ms + math.max(left_ms, tonumber(seen[2] or 0)), 'queue:' .. token)
end
