-- rebind: a Program without a place is bound to another rank. Its force deadline stays.
-- GROUP to waiting order waiters active book leaving stream timers dirty events placement requests continuity segments owners figures
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- ARG id str
-- ARG rank str that it is bound to
-- ARG other str that it will be bound to
-- ARG why str
-- INCLUDE clock record book waiting
-- FLAGS allow-oom
-- RETURN {"ok", version of the other's book} | {"void"}: it has a place, or is gone | {"moved", rank} to be declared
at.rank, at.ms = rank, now_ms()
to.rank, to.ms = other, at.ms
local p = program_of(program, pool, gone, id)
if not p.state or p.state == 'active' then return {'void'} end
if p.rank ~= rank then return {'moved', p.rank} end
local force_ms, ticket = p.force_ms, redis.call('LINDEX', pool, 0)
leave_waiting(at, p)
p.rank, p.force_ms, p.impact_us = other, force_ms, nil
if ticket then wait(to, p, ticket) end
event(to, 'bind', p, why)
save(p)
changed(at)
return {'ok', changed(to)}
