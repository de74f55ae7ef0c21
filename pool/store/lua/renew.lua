-- renew: extend the leases of all jobs a rank holds, and tell which it has lost.
-- KEY leases zset
-- KEY queue stream
-- KEYS jobs hash
-- ARG rank str
-- ARG lease ms
-- ARG tokens list
-- ARG attempts list
-- ARG nonces list
-- INCLUDE clock fence
-- FLAGS allow-oom
-- RETURN for each job its watch string ("" for none), or {state} when it is no longer this attempt's
local until_ms = now_ms() + lease
local reply = {}
for i, job in ipairs(jobs) do
  local refusal, fields = refused(job, attempts[i], nonces[i])
  if refusal then
    reply[i] = {refusal[2] or 'gone'}
  else
    redis.call('ZADD', leases, until_ms, tokens[i])
    -- The fence has just shown that the entry is ours, so this claim cannot steal; it only resets the idle time.
    -- A lost group must not stop the other renewals; the worker's next read rebuilds it.
    redis.pcall('XCLAIM', queue, 'workers', rank, 0, redis.call('HGET', job, 'entry'), 'JUSTID')
    reply[i] = fields[5] or ''
  end
end
return reply
