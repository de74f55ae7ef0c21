-- displace: an idle Program loses the place that its rank has lost.
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- ARG id str
-- ARG rank str that it is bound to
-- INCLUDE clock record book figures waiting place
-- FLAGS allow-oom
-- RETURN {"paused"} | {"void"} | {"moved", rank} to be declared
at.rank, at.ms = rank, now_ms()
local p = program_of(program, pool, gone, id)
if p.state and p.rank ~= rank then return {'moved', p.rank} end
if not p.state then
  -- Its record was deleted from outside.
  if redis.call('ZREM', at.active, id) == 1 then redis.call('HINCRBY', at.book, 'active', -1) end
  return {'void'}
end
if p.inflight > 0 or not is_stale(at, p) then return {'void'} end
pause(at, p, lost_why(at))
save(p)
changed(at)
return {'paused'}
