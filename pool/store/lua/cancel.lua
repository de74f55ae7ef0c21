-- cancel: end a queued or running job now. Its worker, if any, learns it from its next write or from the hint.
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
-- KEYS blocks hash those of its input, in order
-- ARG token str
-- ARG ttl ms
-- INCLUDE clock kept inputs lanes withdrawing entries charge finish
-- FLAGS allow-oom
-- RETURN {"ok", watch, rank} | {"ended", state} | {"gone"} | {"blocks", ids} to be declared
--   | {"program", P} whose job it is: program_cancel does it
local seen = redis.call('HMGET', job, unpack(ENDING))
if not seen[1] then return {'gone'} end
if seen[1] ~= 'queued' and seen[1] ~= 'running' then return {'ended', seen[1]} end
if seen[18] then return {'program', seen[18]} end
local unknown = undeclared(seen[11], blocks)
if unknown then return unknown end
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox,
  timers = timers, tombstone = tombstone, tally = tally, tenants = tenants, blocks = blocks}
return {'ok', finish(keys, token, seen, 'cancelled', ttl, now_ms(), {})}
