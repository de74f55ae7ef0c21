-- complete: end a running job, once: the rest of its log, its terminal fields, the ack and the delete, together.
-- KEY job hash
-- KEY log list
-- KEY queue stream
-- KEY index zset
-- KEY leases zset
-- KEY outbox zset
-- ARG token str
-- ARG attempt str
-- ARG nonce str
-- ARG first_seq tokens logged before the first of these
-- ARG count tokens in these entries
-- ARG entries list
-- ARG state str terminal state
-- ARG ttl ms
-- ARG fields list name, value ... of the terminal record
-- INCLUDE clock fence finish
-- FLAGS allow-oom
-- RETURN {"ok", watch} | {"resend", log end} | {"stale", state} | {"gone"}
local refusal = refused(job, attempt, nonce)
if refusal then return refusal end
local logged = tonumber(redis.call('HGET', job, 'tokens') or 0)
if first_seq ~= logged then return {'resend', logged} end
if #entries > 0 then
  redis.call('RPUSH', log, unpack(entries))
end
redis.call('HSET', job, 'tokens', logged + count, unpack(fields))
local keys = {job = job, log = log, queue = queue, index = index, leases = leases, outbox = outbox}
return {'ok', (finish(keys, token, state, ttl, now_ms()))}
