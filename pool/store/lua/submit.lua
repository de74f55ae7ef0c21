-- submit: accept a job, or leave nothing behind. Idempotent by job token.
-- KEY job hash the job record, no TTL until it ends
-- KEY queue stream
-- KEY index zset
-- ARG token str
-- ARG cap jobs the model may hold, queued and running
-- ARG fields list name, value, name, value ... of the record
-- INCLUDE clock
-- RETURN {"ok", jobs held} | {"duplicate", state} | {"full", jobs held}
local state = redis.call('HGET', job, 'state')
if state then return {'duplicate', state} end
local held = redis.call('ZCARD', index)
if held >= cap then return {'full', held} end
local at_ms = now_ms()
local entry = redis.call('XADD', queue, '*', 'job', token)
redis.call('HSET', job, 'state', 'queued', 'entry', entry, 'created_ms', at_ms, unpack(fields))
redis.call('ZADD', index, at_ms, token)
return {'ok', held + 1}
