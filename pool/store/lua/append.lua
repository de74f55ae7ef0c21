-- append: add tokens to a running job's log. Repeating it changes nothing; a gap or an overlap answers where to resend from.
-- KEY job hash
-- KEY log list packed entries
-- ARG attempt str
-- ARG nonce str
-- ARG first_seq tokens logged before the first of these
-- ARG count tokens in these entries
-- ARG entries list
-- INCLUDE fence
-- FLAGS allow-oom
-- RETURN {"ok", watch} | {"old", log end} | {"resend", log end} | {"stale", state} | {"gone"}
local refusal, seen = refused(job, attempt, nonce)
if refusal then return refusal end
local logged = tonumber(seen[4] or 0)
if first_seq + count <= logged then return {'old', logged} end
if first_seq ~= logged then return {'resend', logged} end
for i = 1, #entries, 1000 do
  redis.call('RPUSH', log, unpack(entries, i, math.min(i + 999, #entries)))
end
redis.call('HSET', job, 'tokens', logged + count)
return {'ok', seen[5] or ''}
