-- take_back: take a job from a rank whose lease ran out: back to the queue, or failed as poison at the cap.
-- Only an attempt that logged no token counts. Before its last try the job becomes suspect, to run alone: it is blamed
-- only when it was alone, or lost far too often.
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
-- KEY dead stream
-- KEYS blocks hash those of its input, in order
-- ARG token str
-- ARG cap attempts without a token that may be lost in a row
-- ARG ttl ms
-- ARG keep dead letters kept
-- INCLUDE clock requeue blame kept inputs lanes withdrawing entries charge finish
-- FLAGS allow-oom
-- RETURN {"requeued", watch, rank} | {"poison", watch, rank} | {"live"} | {"ended"} | {"blocks", ids} to be declared
--   | {"program", P} whose job it is: program_take_back does it
local at_ms = now_ms()
if tonumber(redis.call('HGET', sweep, 'hold_until_ms') or 0) > at_ms then return {'live'} end
local until_ms = redis.call('ZSCORE', leases, token)
if not until_ms or tonumber(until_ms) > at_ms then return {'live'} end
local seen = redis.call('HMGET', job, unpack(ENDING))
if seen[1] ~= 'running' then
  redis.call('ZREM', leases, token)
  return {'ended'}
end
if seen[18] then return {'program', seen[18]} end
local unknown = undeclared(seen[11], blocks)
if unknown then return unknown end
local poison = blame(job, seen, cap, dead, keep, token)
if not poison then
  requeue(job, queue, leases, timers, tally, token, 'lost', at_ms)
  return {'requeued', seen[4] or '', seen[5] or ''}
end
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox,
  timers = timers, tombstone = tombstone, tally = tally, tenants = tenants, blocks = blocks}
return {'poison', finish(keys, token, seen, 'failed', ttl, at_ms, poison)}
