-- hand_back: give a running job back to the queue, with the tokens it logged. Costs it nothing.
-- KEY job hash
-- KEY queue stream
-- KEY leases zset
-- KEY timers zset
-- KEY tally list
-- ARG token str
-- ARG attempt str
-- ARG nonce str
-- INCLUDE clock fence requeue
-- FLAGS allow-oom
-- RETURN {"ok"} | {"stale", state} | {"gone"}
local refusal = refused(job, attempt, nonce)
if refusal then return refusal end
requeue(job, queue, leases, timers, tally, token, 'handed_back', now_ms())
return {'ok'}
