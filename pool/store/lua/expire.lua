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
-- INCLUDE clock gap due kept inputs lanes withdrawing entries charge finish
-- FLAGS allow-oom
-- RETURN {"failed", watch, rank} | {"cancelled", watch, rank} | {"early"} | {"void"}
--   | {"blocks", ids} to be declared | {"program", P} whose job it is: program_expire does it
local at_ms = now_ms()
local early = not_due(timers, sweep, kind, token, lease, at_ms)
if early then return early end
local seen = redis.call('HMGET', job, unpack(ENDING))
local live = seen[1] == 'queued' or seen[1] == 'running'
if live and seen[18] then return {'program', seen[18]} end
local unknown = live and undeclared(seen[11], blocks)
if unknown then return unknown end
redis.call('ZREM', timers, kind .. ':' .. token)
if not live then return {'void'} end
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox,
  timers = timers, tombstone = tombstone, tally = tally, tenants = tenants, blocks = blocks}
if kind == 'reader' then return {'cancelled', finish(keys, token, seen, 'cancelled', ttl, at_ms, {})} end
return {'failed', finish(keys, token, seen, 'failed', ttl, at_ms, reason_of(kind))}
