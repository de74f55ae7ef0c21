-- program_cancel: end a queued or running job of a Program now, and let the Program go on, wait or rest without it.
-- GROUP keys job log queue index leases outbox timers tombstone tally tenants
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- KEY front hash the job that its pool begins with; any key where none is known
-- KEYS blocks hash those of its input, in order
-- ARG token str
-- ARG ttl ms
-- ARG id str of the Program
-- ARG rank str that the Program is bound to
-- ARG front_token str
-- INCLUDE clock kept inputs lanes withdrawing entries charge finish record book figures waiting place rest concerned
-- FLAGS allow-oom
-- RETURN {"ok", watch, rank} | {"ended", state} | {"gone"} | {"blocks", ids} | {"moved", rank} | {"front", token} to be
--   declared
local seen = redis.call('HMGET', keys.job, unpack(ENDING))
if not seen[1] then return {'gone'} end
if seen[1] ~= 'queued' and seen[1] ~= 'running' then return {'ended', seen[1]} end
local unknown = undeclared(seen[11], blocks)
if unknown then return unknown end
local p, ticket, refused = concerned(at, keys.job)
if refused then return refused end
keys.blocks = blocks
local watch, worker = finish(keys, token, seen, 'cancelled', ttl, at.ms, {})
conclude(at, p, ticket, token, 'request_cancelled', {})
return {'ok', watch, worker}
