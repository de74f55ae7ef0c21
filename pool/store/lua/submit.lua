-- submit: accept a job, or leave nothing behind. Idempotent by job token.
-- KEY job hash the job record, no TTL until it ends
-- KEY queue stream
-- KEY index zset
-- KEY timers zset
-- KEY tombstone string
-- KEYS blocks hash one a block of a large input, written once; no TTL while an unended job holds it
-- ARG token str
-- ARG cap choices the model may hold, queued and running
-- ARG n choices of this job
-- ARG queue_timeout ms until it fails unless it has begun
-- ARG deadline ms until it fails wherever it is, 0 for none
-- ARG reader ms until it is cancelled unless its reader renews, 0 for a job that nobody waits for
-- ARG data list the content of each block, compressed; "" where it is not sent because it is likely to be there
-- ARG fields list name, value, name, value ... of the record
-- INCLUDE clock hold
-- RETURN {"ok", choices held} | {"duplicate", state} | {"expired"} | {"full", choices held}
--   | {"missing", position ...} blocks that must be sent
local state = redis.call('HGET', job, 'state')
if state then return {'duplicate', state} end
if redis.call('EXISTS', tombstone) == 1 then return {'expired'} end
local held = redis.call('ZCARD', index)
if held + n > cap then return {'full', held} end
local missing = blocks[1] and hold(token, blocks, data)
if missing then return missing end
local at_ms = now_ms()
local entry = redis.call('XADD', queue, '*', 'job', token)
redis.call('HSET', job, 'state', 'queued', 'entry', entry, 'created_ms', at_ms, unpack(fields))
redis.call('ZADD', index, at_ms, token)
for choice = 1, n - 1 do redis.call('ZADD', index, at_ms, token .. '#' .. choice) end
redis.call('ZADD', timers, at_ms + queue_timeout, 'queue:' .. token)
if deadline > 0 then redis.call('ZADD', timers, at_ms + deadline, 'deadline:' .. token) end
if reader > 0 then redis.call('ZADD', timers, at_ms + reader, 'reader:' .. token) end
return {'ok', held + n}
