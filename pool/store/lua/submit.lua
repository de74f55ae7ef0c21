-- submit: accept a job, or leave nothing behind. Idempotent by job token.
-- KEY job hash the job record, no TTL until it ends
-- KEY queue stream
-- KEY index zset
-- KEY timers zset
-- KEY tombstone string
-- KEY tenants zset
-- KEYS blocks hash one a block of a large input, written once; no TTL while an unended job holds it
-- ARG token str
-- ARG not_after ms by this server's clock: when its caller gives up, so that nothing happens behind its back
-- ARG cap choices the model may hold, queued and running; 0: none are taken now
-- ARG tenant str
-- ARG own_cap choices its tenant may hold, 0: they are not counted
-- ARG claimed flag 1: an Idempotency-Key stands for this id, so a refusal is final: the key may then be freed
-- ARG remember ms that a final refusal is remembered
-- ARG n choices of this job
-- ARG queue_timeout ms until it fails unless it has begun
-- ARG deadline ms until it fails wherever it is, 0 for none
-- ARG reader ms until it is cancelled unless its reader renews, 0 for a job that nobody waits for
-- ARG data list the content of each block, compressed; "" where it is not sent because it is likely to be there
-- ARG fields list name, value, name, value ... of the record
-- INCLUDE clock hold own
-- RETURN {"ok", at_ms} | {"duplicate", at_ms} | {"expired", at_ms} | {"late", at_ms} | {"full", at_ms, choices held}
--   | {"crowded", at_ms, choices its tenant holds} | {"refused", at_ms} before, for good
--   | {"missing", position ...} blocks that must be sent
local at_ms = now_ms()
if redis.call('EXISTS', job) == 1 then return {'duplicate', at_ms} end
local over = redis.call('GET', tombstone)
if over then return {over == 'refused' and over or 'expired', at_ms} end
if at_ms > not_after then return {'late', at_ms} end
local held = redis.call('ZCARD', index)
local code = held + n > cap and 'full'
if not code and own_cap > 0 then
  held = owned(tenants, index, tenant, own_cap - n)
  code = held + n > own_cap and 'crowded'
end
if code then
  if claimed == 1 then redis.call('SET', tombstone, 'refused', 'PX', remember) end
  return {code, at_ms, held}
end
local missing = blocks[1] and hold(token, blocks, data)
if missing then return missing end
local entry = redis.call('XADD', queue, '*', 'job', token)
redis.call('HSET', job, 'state', 'queued', 'entry', entry, 'created_ms', at_ms, unpack(fields))
redis.call('ZADD', index, at_ms, token)
if own_cap > 0 then redis.call('ZADD', tenants, 0, tenant .. ':' .. token) end
for choice = 1, n - 1 do
  redis.call('ZADD', index, 0, token .. '#' .. choice)
  if own_cap > 0 then redis.call('ZADD', tenants, 0, tenant .. ':' .. token .. '#' .. choice) end
end
redis.call('ZADD', timers, at_ms + queue_timeout, 'queue:' .. token)
if deadline > 0 then redis.call('ZADD', timers, at_ms + deadline, 'deadline:' .. token) end
if reader > 0 then redis.call('ZADD', timers, at_ms + reader, 'reader:' .. token) end
return {'ok', at_ms}
