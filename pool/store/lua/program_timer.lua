-- program_timer: carry out a Program's timer that is due: the end of a hold, or of the time an idle one is remembered.
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- KEY sweep hash
-- ARG id str
-- ARG rank str that it is bound to
-- ARG kind str ttl or retention
-- ARG lease ms
-- INCLUDE clock gap due record book figures waiting place rest
-- FLAGS allow-oom
-- RETURN {"paused"} | {"released"} | {"early"} | {"void"} | {"moved", rank} to be declared
at.rank, at.ms = rank, now_ms()
local early = not_due(at.timers, sweep, kind, id, lease, at.ms)
if early then return early end
local p = program_of(program, pool, gone, id)
if p.state and p.rank ~= rank then return {'moved', p.rank} end
redis.call('ZREM', at.timers, kind .. ':' .. id)
if not p.state or p.inflight > 0 or p.standing then return {'void'} end
local done = 'paused'
if kind == 'retention' then
  done = 'released'
  release(at, p, 'retention')
elseif p.state == 'active' then
  pause(at, p, 'ttl_expired')
end
save(p)
changed(at)
return {done}
