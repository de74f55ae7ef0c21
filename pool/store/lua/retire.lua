-- retire: a rank leaves. Its consumer goes too, unless entries are still pending there: deleting it would lose them.
-- KEY record hash
-- KEY ranks zset
-- KEY told hash
-- KEY places zset
-- KEY queue stream
-- KEY hungry zset
-- KEY load hash rank -> `IN_FLIGHT SLOTS`
-- ARG rank str
-- ARG incarnation str
-- FLAGS allow-oom
-- RETURN {"ok"} | {"taken"}
if redis.call('HGET', record, 'incarnation') ~= incarnation then return {'taken'} end
redis.call('DEL', record)
redis.call('ZREM', ranks, rank)
redis.call('ZREM', hungry, rank)
redis.call('HDEL', told, rank)
redis.call('HDEL', load, rank)
redis.call('ZREM', places, rank)
local pending = redis.pcall('XPENDING', queue, 'workers', '-', '+', 1, rank)
if not pending.err and #pending == 0 then redis.call('XGROUP', 'DELCONSUMER', queue, 'workers', rank) end
return {'ok'}
