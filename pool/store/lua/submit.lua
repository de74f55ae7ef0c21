-- submit: accept a job, or leave nothing behind. Idempotent by job token. It waits in its lane, or, where a rank waits for
-- work, goes into the stream at once and wakes it.
-- KEY job hash the job record, no TTL until it ends
-- KEY queue stream
-- KEY hungry zset ranks that wait for work
-- KEY index zset
-- KEY timers zset
-- KEY tombstone string
-- KEY tenants zset
-- KEY model hash
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
-- ARG flow str LANE:KEY, the fairness key it waits with
-- ARG terms str N:WEIGHT:CAP, or N:WEIGHT:CAP:SESSION, of its turn (lib/lanes.lua)
-- ARG fields list name, value, name, value ... of the record
-- INCLUDE clock hold own closed lanes readers accept moving
-- RETURN {"ok", at_ms} | {"duplicate", at_ms} | {"expired", at_ms} | {"late", at_ms} | {"full", at_ms, choices held}
--   | {"crowded", at_ms, choices its tenant holds} | {"refused", at_ms} before, for good
--   | {"closed", at_ms, unloading | unloaded | failed, 1 when the model will be loaded again}
--   | {"missing", position ...} blocks that must be sent
local order = now_us()
local at_ms = math.floor(order / 1000)
local refused = refusal(at_ms)
if refused then return refused end
local turn = enlist(at_ms, at_ms, order)
-- While anything waits, no rank has room, or that would not.
if redis.call('EXISTS', lanes.backlog) == 1 or not is_awaited(at_ms) then
  join(turn)
else
  move_at_once(turn)
end
return {'ok', at_ms}
