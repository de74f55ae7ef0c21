-- program_hand_back: give a begun job of a Program back, or an entry that was read and never begun. Costs the job nothing.
-- KEY job hash
-- KEY leases zset
-- KEY timers zset
-- KEY tally list
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- ARG token str
-- ARG attempt str "" for one that was never begun, or whose begin was never answered
-- ARG nonce str "" when another one gives it back
-- ARG entry str of one that was never begun
-- ARG id str of the Program
-- ARG rank str
-- INCLUDE clock requeue record book figures waiting place put_back
-- FLAGS allow-oom
-- RETURN {"ok"} | {"stale", state} | {"gone"} | {"lost"}: its Program is elsewhere
at.rank, at.ms = rank, now_ms()
local seen = redis.call('HMGET', job, 'state', 'attempt', 'nonce', 'entry', 'generation')
if not seen[1] then return {'gone'} end
local leased = redis.call('ZSCORE', leases, token)
local own = seen[1] == 'running' and seen[2] == attempt and seen[3] == nonce
if attempt == '' then
  own = seen[4] == entry and (seen[1] == 'queued' or seen[1] == 'running') and (not leased or seen[3] == nonce)
end
if not own then return {'stale', seen[1]} end
local p = program_of(program, pool, gone, id)
if p.gen ~= tonumber(seen[5]) or p.rank ~= rank then return {'lost'} end
put_back(at, p, job, leases, timers, tally, token, attempt == '' and 'unbegun' or 'handed_back')
save(p)
changed(at)
return {'ok'}
