-- release: a Program is over, because its owner says so. One with jobs is over when they have ended; those that wait are
-- named, to be cancelled. Repeating it changes nothing.
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- ARG id str
-- ARG rank str that it is bound to
-- INCLUDE clock record book figures waiting place rest
-- FLAGS allow-oom
-- RETURN {"released"} | {"ending", in flight, ticket ...} at most 100 | {"gone"} | {"moved", rank} to be declared
at.rank, at.ms = rank, now_ms()
local p = program_of(program, pool, gone, id)
if not p.state then return {'gone'} end
if p.rank ~= rank then return {'moved', p.rank} end
local tickets = redis.call('LRANGE', pool, 0, 99)
if p.inflight == 0 and #tickets == 0 then release(at, p, 'finished') else p.ending = 1 end
save(p)
changed(at)
if not p.ending then return {'released'} end
return {'ending', p.inflight, unpack(tickets)}
