-- cancel: end a queued or running job now. Its worker, if any, learns it from its next write or from the hint.
-- KEY job hash
-- KEY log list
-- KEY queue stream
-- KEY index zset
-- KEY leases zset
-- KEY outbox zset
-- ARG token str
-- ARG ttl ms
-- INCLUDE clock finish
-- FLAGS allow-oom
-- RETURN {"ok", watch, rank} | {"ended", state} | {"gone"}
local state = redis.call('HGET', job, 'state')
if not state then return {'gone'} end
if state ~= 'queued' and state ~= 'running' then return {'ended', state} end
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox}
return {'ok', finish(keys, token, 'cancelled', ttl, now_ms())}
