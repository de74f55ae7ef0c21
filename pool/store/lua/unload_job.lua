-- unload_job: end a job of a model that is being unloaded, as failed: one that has not begun, or the time to drain is over.
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
-- KEY model hash
-- KEYS blocks hash those of its input, in order
-- ARG token str
-- ARG ttl ms
-- ARG late ms behind the time to drain, in which its worker hands it back
-- INCLUDE clock kept inputs lanes withdrawing entries charge finish unloading
-- FLAGS allow-oom
-- RETURN {"ok", watch, rank} | {"busy"} it has begun | {"kept"} the model is not being unloaded | {"ended", state} | {"gone"}
--   | {"blocks", ids} to be declared | {"program", P} whose job it is: program_unload_job does it
local at_ms, seen = now_ms(), redis.call('HMGET', job, unpack(ENDING))
if not seen[1] then return {'gone'} end
if seen[1] ~= 'queued' and seen[1] ~= 'running' then return {'ended', seen[1]} end
local reason = stays(model, seen[1], late, at_ms)
if reason then return reason end
if seen[18] then return {'program', seen[18]} end
local unknown = undeclared(seen[11], blocks)
if unknown then return unknown end
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox,
  timers = timers, tombstone = tombstone, tally = tally, tenants = tenants, blocks = blocks}
return {'ok', finish(keys, token, seen, 'failed', ttl, at_ms, UNLOADED)}
