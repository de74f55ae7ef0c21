-- claim_key: bind an idempotency key to a job id and a body, or tell what it is bound to.
-- KEY key hash with TTL
-- ARG job str id to bind it to
-- ARG body str hash of the request body
-- ARG ttl ms the key lives from its last use on, at least
-- RETURN {"new"} | {"same", job} | {"other"}
local seen = redis.call('HMGET', key, 'job', 'body')
if not seen[1] then
  redis.call('HSET', key, 'job', job, 'body', body)
  redis.call('PEXPIRE', key, ttl)
  return {'new'}
end
if seen[2] ~= body then return {'other'} end
redis.call('PEXPIRE', key, ttl, 'GT')
return {'same', seen[1]}
