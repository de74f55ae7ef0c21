-- program_expire: carry out a timer of a Program's job that is due, as expire does for others.
-- GROUP keys job log queue index leases outbox timers tombstone tally tenants
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- KEY front hash the job that its pool begins with; any key where none is known
-- KEYS blocks hash those of its input, in order
-- KEY sweep hash
-- ARG kind str queue, run, deadline or reader
-- ARG token str
-- ARG ttl ms
-- ARG lease ms
-- ARG id str of the Program
-- ARG rank str that the Program is bound to
-- ARG front_token str
-- INCLUDE clock gap due kept inputs lanes withdrawing entries charge finish record book figures waiting place rest concerned
-- FLAGS allow-oom
-- RETURN {"failed", watch, rank} | {"cancelled", watch, rank} | {"early"} | {"void"}
--   | {"blocks", ids} | {"moved", rank} | {"front", token} to be declared
local early = not_due(keys.timers, sweep, kind, token, lease, now_ms())
if early then return early end
local seen = redis.call('HMGET', keys.job, unpack(ENDING))
local live = seen[1] == 'queued' or seen[1] == 'running'
local unknown = live and undeclared(seen[11], blocks)
if unknown then return unknown end
local p, ticket, refused
if live then p, ticket, refused = concerned(at, keys.job) end
if refused then return refused end
redis.call('ZREM', keys.timers, kind .. ':' .. token)
if not live then return {'void'} end
keys.blocks = blocks
local by_deadline = kind == 'queue' and redis.call('HGET', keys.job, 'waits_by_deadline')
local why = kind == 'reader' and {} or reason_of(by_deadline and 'wait_deadline' or kind)
local state = kind == 'reader' and 'cancelled' or 'failed'
local watch, worker = finish(keys, token, seen, state, ttl, at.ms, why)
conclude(at, p, ticket, token, kind == 'reader' and 'request_cancelled' or 'request_failed', {})
return {state, watch, worker}
