-- seat: which process a rank is; "" for none, when the rank is away. Whatever the former process had is fenced by it.
-- KEY record hash the registration of the rank, gone with its lease
-- KEY members zset
-- KEY sweep hash
-- ARG rank str
-- ARG incarnation str
-- ARG former str that shall be away; not looked at when another process takes the rank
-- ARG leaves flag 1: it leaves, though it is registered; what it has begun may still end there
-- ARG why str what Programs are paused for that lose their place by it
-- ARG lease ms
-- INCLUDE clock gap book
-- FLAGS allow-oom
-- RETURN {"ok", former incarnation} | {"same"} | {"other", incarnation} | {"live"}
--   | {"held"}: it may have been unable to renew
at.rank, at.ms = rank, now_ms()
local was = redis.call('HGET', at.book, 'incarnation') or ''
-- One that comes while the rank is away takes nobody's place.
local loses = incarnation == '' or was ~= ''
if incarnation ~= '' then redis.call('ZADD', members, at.ms, rank) end
if was == incarnation then return {'same'} end
if incarnation == '' then
  if was ~= former then return {'other', was} end
  if leaves == 0 and redis.call('HGET', record, 'incarnation') == was then return {'live'} end
  if leaves == 0 and gap_of(sweep, lease, at.ms) > at.ms then return {'held'} end
  -- From now on it is away.
  redis.call('ZADD', members, 'XX', at.ms, rank)
end
redis.call('HDEL', at.book, 'obs_began_ms', 'obs_tokens', 'obs_moved', 'obs_waiting', 'obs_running')
redis.call('HSET', at.book, 'incarnation', incarnation, 'leaving', 0, 'closing', leaves == 1 and was or '')
if loses then redis.call('HSET', at.book, 'why', why) end
-- What left the former process is gone with it.
redis.call('UNLINK', at.leaving)
redis.call('HINCRBY', at.placement, 'ranks', 1)
changed(at)
return {'ok', was}
