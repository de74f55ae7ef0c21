-- program_take_back: take a job of a Program from a rank that lost its lease of it, as take_back does for others, or from
-- a rank that lost all: then at once, and whether it was begun or not.
-- GROUP keys job log queue index leases outbox timers tombstone tally tenants
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- KEY front hash the job that its pool begins with; any key where none is known
-- KEYS blocks hash those of its input, in order
-- KEY sweep hash
-- KEY dead stream
-- ARG token str
-- ARG cap attempts without a token that may be lost in a row
-- ARG ttl ms
-- ARG keep dead letters kept
-- ARG id str of the Program
-- ARG rank str that the Program is bound to
-- ARG front_token str
-- INCLUDE clock requeue blame kept inputs lanes withdrawing entries charge finish record book figures waiting place rest concerned put_back
-- FLAGS allow-oom
-- RETURN {"requeued", watch, rank} | {"poison", watch, rank} | {"live"} | {"ended"}
--   | {"blocks", ids} | {"moved", rank} | {"front", token} to be declared
local seen = redis.call('HMGET', keys.job, unpack(ENDING))
local queued = seen[1] == 'queued'
if not queued and seen[1] ~= 'running' then
  redis.call('ZREM', keys.leases, token)
  return {'ended'}
end
local unknown = undeclared(seen[11], blocks)
if unknown then return unknown end
local p, ticket, refused = concerned(at, keys.job)
if refused then return refused end
local lost = p and is_stale(at, p) and (queued or not may_end(at, p))
local until_ms = tonumber(redis.call('ZSCORE', keys.leases, token) or math.huge)
local held = tonumber(redis.call('HGET', sweep, 'hold_until_ms') or 0) > at.ms
if ticket or not lost and (held or until_ms > at.ms) then return {'live'} end
local poison = not queued and blame(keys.job, seen, cap, dead, keep, token)
if not p then poison = {'error_code', 'program_lost', 'error_message', 'The record of its Program is gone.'} end
if poison then
  keys.blocks = blocks
  local watch, worker = finish(keys, token, seen, 'failed', ttl, at.ms, poison)
  conclude(at, p, ticket, token, 'request_failed', {})
  return {'poison', watch, worker}
end
put_back(at, p, keys.job, keys.leases, keys.timers, keys.tally, token, queued and 'unbegun' or 'lost')
save(p)
changed(at)
return {'requeued', seen[4] or '', seen[5] or ''}
