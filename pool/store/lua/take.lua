-- take: the next jobs for a rank: as many as it has room for are moved from their lanes into the model's stream, where it reads
-- them next. One for which nothing is moved, and that is going to wait, is noted as hungry.
-- KEY queue stream of the model
-- KEY hungry zset
-- ARG rank str
-- ARG room choices
-- ARG stand ms that a rank is noted for, 0: it is not going to wait
-- INCLUDE clock lanes looking choosing feed readers
-- FLAGS allow-oom
-- RETURN 1 when it was noted, else 0
local at_ms = now_ms()
if redis.call('EXISTS', lanes.backlog) == 1 then
  local left = unread()
  if not left then return redis.error_reply('NOGROUP The model has no stream, or no group of readers.') end
  redis.call('ZREM', hungry, rank)
  feed(math.min(room + readers(at_ms) - left, 100))
  return 0
end
if stand == 0 then return 0 end
redis.call('ZREMRANGEBYSCORE', hungry, '-inf', at_ms)
redis.call('ZADD', hungry, at_ms + stand, rank)
redis.call('PEXPIRE', hungry, stand)
return 1
