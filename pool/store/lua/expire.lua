-- expire: carry out a timer that is due; it is removed here and nowhere else before its job ends.
-- KEY job hash
-- KEY log list
-- KEY queue stream
-- KEY index zset
-- KEY leases zset
-- KEY outbox zset
-- KEY timers zset
-- KEY tombstone string
-- KEY tally list
-- KEY tenants zset
-- KEY sweep hash
-- KEYS blocks hash those of its input, in order
-- ARG kind str queue, run, deadline or reader
-- ARG token str
-- ARG ttl ms
-- ARG lease ms
-- INCLUDE clock kept inputs finish
-- FLAGS allow-oom
-- RETURN {"failed", watch, rank} | {"cancelled", watch, rank} | {"early"} | {"void"}
--   | {"blocks", ids} to be declared
local at_ms = now_ms()
local timer = kind .. ':' .. token
local due_ms = redis.call('ZSCORE', timers, timer)
if not due_ms then return {'void'} end
if tonumber(due_ms) > at_ms then return {'early'} end
-- As with leases: after a gap in the sweeps a reader has a lease's time to say that it is there. So have workers to begin
-- or end what timed out in the gap; a deadline is a point in time. Put off, a timer is not in the way of those behind it.
local swept = redis.call('HMGET', sweep, 'last_ms', 'hold_until_ms', 'back_ms')
local gap_ms = at_ms - tonumber(swept[1] or 0)
local gap = gap_ms < 0 or gap_ms > lease / 2
local hold_until_ms = gap and at_ms + lease or tonumber(swept[2] or 0)
local in_gap = gap or tonumber(due_ms) <= tonumber(swept[3] or 0)
if hold_until_ms > at_ms and (kind == 'reader' or kind ~= 'deadline' and in_gap) then
  redis.call('ZADD', timers, hold_until_ms, timer)
  return {'early'}
end
local seen = redis.call('HMGET', job, unpack(ENDING))
local live = seen[1] == 'queued' or seen[1] == 'running'
local unknown = live and undeclared(seen[11], blocks)
if unknown then return unknown end
redis.call('ZREM', timers, timer)
if not live then return {'void'} end
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox,
  timers = timers, tombstone = tombstone, tally = tally, tenants = tenants, blocks = blocks}
if kind == 'reader' then return {'cancelled', finish(keys, token, seen, 'cancelled', ttl, at_ms, {})} end
local reasons = {
  queue = {'queue_timeout', 'No worker began it within its queue timeout.'},
  run = {'run_timeout', 'It did not end within its run timeout.'},
  deadline = {'deadline_exceeded', 'Its deadline passed before it ended.'},
}
local values = {'error_code', reasons[kind][1], 'error_message', reasons[kind][2]}
return {'failed', finish(keys, token, seen, 'failed', ttl, at_ms, values)}
