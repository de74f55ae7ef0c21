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
-- INCLUDE clock requeue kept inputs finish
-- FLAGS allow-oom
-- RETURN {"requeued", watch, rank} | {"poison", watch, rank} | {"live"} | {"ended"} | {"blocks", ids} to be declared
local at_ms = now_ms()
if tonumber(redis.call('HGET', sweep, 'hold_until_ms') or 0) > at_ms then return {'live'} end
local until_ms = redis.call('ZSCORE', leases, token)
if not until_ms or tonumber(until_ms) > at_ms then return {'live'} end
local seen = redis.call('HMGET', job, unpack(ENDING))
if seen[1] ~= 'running' then
  redis.call('ZREM', leases, token)
  return {'ended'}
end
local unknown = undeclared(seen[11], blocks)
if unknown then return unknown end
local before = redis.call('HMGET', job, 'begun_tokens', 'crashes', 'blamed', 'suspect')
local losses = redis.call('HINCRBY', job, 'losses', 1)
local crashes, blamed = 0, ''
if tonumber(seen[8] or 0) == tonumber(before[1] or 0) then
  crashes, blamed = tonumber(before[2] or 0) + 1, (before[3] or '') .. seen[10] .. ' '
end
local suspect = crashes > 0 and crashes >= cap - 1 and 1 or 0
redis.call('HSET', job, 'crashes', crashes, 'blamed', blamed, 'suspect', suspect)
if not (crashes >= cap and (before[4] == '1' or cap == 1) or losses >= 10 * cap) then
  requeue(job, queue, leases, timers, tally, token, 'lost', at_ms)
  return {'requeued', seen[4] or '', seen[5] or ''}
end
redis.call('XADD', dead, 'MAXLEN', '~', keep, '*', 'job', token, 'code', 'poison', 'losses', losses, 'rank', seen[5])
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox,
  timers = timers, tombstone = tombstone, tally = tally, tenants = tenants, blocks = blocks}
local reason = 'It lost its worker ' .. losses .. ' times; it was not tried again.'
local values = {'error_code', 'poison', 'error_message', reason}
return {'poison', finish(keys, token, seen, 'failed', ttl, at_ms, values)}
